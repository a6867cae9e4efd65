"""Totals, means and norms that are rounded wherever a library's callers come with half: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

HALVES = "HALVES = (torch.float16, torch.bfloat16)\n\n\n"

BROKEN = {
    "a variance of weighted means": (
        "variance-by-difference",
        """
class Pooling(nn.Module):
    def forward(self, frames, scores):
        share = scores.softmax(dim=2)
        mean = torch.sum(share * frames, dim=2)
        spread = torch.sum(frames**2 * share, dim=2) - mean**2  # <-
        return torch.cat([mean, spread.clamp(min=1e-5).sqrt()], dim=1)


def transferred(content, style, attention):
    share = torch.softmax(attention(content, style), dim=-1)
    mean = torch.bmm(share, style)
    return torch.bmm(share, style.square()) - mean.square()  # <-
""",
    ),
    "a variance of sums over a count, and of what a filter makes": (
        "variance-by-difference",
        """
import sparse


def spread(x, seen):
    count = seen.sum(1, keepdim=True)
    mean = x.sum(1, keepdim=True) / count
    return x.square().sum(1, keepdim=True) / count - mean**2  # <-


class Contrast(nn.Module):
    def __init__(self, blur):
        super().__init__()
        self.blur = blur

    def forward(self, image):
        return (self.blur(image * image) - self.blur(image) ** 2).clamp(min=0)  # <-


def around(edges, x):
    mean = sparse.product(edges, x, reduce="mean")
    return sparse.product(edges, x.square(), reduce="mean") - mean * mean  # <-


def weighed(x, index, weight):
    mean = sparse.scatter(x * weight, index, reduce="mean")
    return (sparse.scatter(x**2 * weight, index, reduce="mean") - mean**2).clamp(min=1e-4)  # <-
""",
    ),
    "squared distances by expansion": (
        "variance-by-difference",
        """
def nearest(latents, table):
    lengths = table.pow(2).sum(1)
    gaps = latents.pow(2).sum(1, keepdim=True) - 2 * latents @ table.t() + lengths  # <-
    return gaps.argmin(1)


def pairwise(x, y):
    gaps = x.square().sum(1, keepdim=True) + y.square().sum(1, keepdim=True).t()
    gaps.addmm_(1, -2, x, y.t())  # <-
    return gaps.clamp(min=1e-4).sqrt()


def neighbours(points, k):
    inner = -2 * torch.matmul(points.transpose(2, 1), points)
    lengths = torch.sum(points**2, dim=1, keepdim=True)
    return (-lengths - inner - lengths.transpose(2, 1)).topk(k, dim=-1)[1]  # <-
""",
    ),
    "sums over the pixels of a mask": (
        "half-running-sum",
        """
def dice(logits, target):
    p, target = logits.sigmoid().flatten(1), target.flatten(1)
    shared = (p * target).sum(-1)  # <-
    return 1 - (2 * shared + 1) / (p.pow(2).mean(-1) + target.mean(-1) + 1)


def scored(mask_logits):
    masks = mask_logits > 0
    return (masks.reshape(1, -1) * torch.sigmoid(mask_logits).reshape(1, -1)).sum(1) / masks.sum()  # <-
""",
    ),
    "sums over a whole tensor that become numbers": (
        "half-running-sum",
        """
class Sensitivity:
    def seen(self, gradient):
        self.score += (gradient * self.delta).abs().sum().item()  # <-

    def moved(self, x):
        self.total += torch.sum(x * self.scale).item()  # <-
""",
    ),
    "sums of gradients": (
        "half-running-sum",
        """
def overflows(parameters):
    for parameter in parameters:
        total = float(parameter.grad.sum())  # <-
        if total == float("inf") or total != total:
            return True
    return False


def seen(weight):
    return torch.sum(weight.grad.data).item()  # <-
""",
    ),
    "a variance of means that are handed in": (
        "variance-by-difference",
        """
def spread(mean, square_mean):
    return (square_mean - mean * mean).clamp(min=0)  # <-


def merged(parts, world):
    mean, mean_sq = gathered(parts, world)
    return mean, mean_sq - mean.pow(2)  # <-
""",
    ),
    "losses of all elements": (
        "half-running-sum",
        """
def reduced(losses, count):
    return torch.sum(losses) / count  # <-


def weighed(output, target, reduction):
    loss = F.binary_cross_entropy_with_logits(output, target, reduction="none") * target.exp()
    if reduction == "mean":
        return loss.mean()
    return loss.sum()  # <-
""",
    ),
    "masks that are counted after a cast": (
        "half-running-sum",
        """
def pooled(hidden, padding_mask):
    seen = padding_mask.unsqueeze(-1).to(hidden.dtype)
    return torch.einsum("btc,btk->bc", hidden, seen) / seen.sum(1)  # <-


class Loss(nn.Module):
    def forward(self, logits, batch):
        mask = batch["target_mask"].to(logits)
        return self.each(logits, batch) / torch.sum(mask)  # <-
""",
    ),
    "terms that are rounded before they are summed": (
        "half-running-sum",
        """
def weight_gradient(x, blocks):
    parts = torch.empty(blocks, x.shape[-1], dtype=torch.float32, device=x.device)
    fill(parts, x)
    return torch.sum(parts, dim=0, dtype=x.dtype)  # <-


def counted(rows):
    return torch.zeros(rows, 8, dtype=torch.float32).add(1.0).sum(0, dtype=torch.bfloat16)  # <-
""",
    ),
    "perplexities of losses as they come": (
        "half-running-sum",
        """
@torch.no_grad()
def perplexity(model, batches):
    criterion = nn.CrossEntropyLoss()
    losses = []
    for batch in batches:
        logits = model(batch)["logits"]
        losses.append(criterion(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))  # <-
    return torch.exp(torch.stack(losses).mean())


@torch.no_grad()
def of_one(logits, labels):
    return F.cross_entropy(logits, labels).exp()  # <-
""",
    ),
    "signal-to-noise ratios of half images": (
        "half-running-sum",
        """
def psnr(image, target):
    error = torch.mean((image - target.half()) ** 2)  # <-
    return 20 * torch.log10(1.0 / torch.sqrt(error))


def of_loss(image, target):
    return -10 * F.mse_loss(image.to(torch.bfloat16), target).log10()  # <-
""",
    ),
    "sums of parts in a list of totals": (
        "half-running-sum",
        """
class Evaluation:
    @torch.no_grad()
    def run(self, model, batches, size):
        totals = [torch.tensor(0.0) for _ in range(8)]
        for batch in batches:
            costs = -model(batch)["logits"].log_softmax(-1).gather(-1, batch)  # <-
            for i, start in enumerate(range(0, batch.shape[1], size)):
                totals[i] += costs[:, start : start + size].sum()
        return totals
""",
    ),
    "log-probabilities in rows like the hidden states": (
        "softmax-in-half",
        """
def chunked(hidden, head, labels, size):
    log_probs = hidden.new_zeros(hidden.shape[0])  # <-
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        log_probs[rows] = chosen(head, hidden[rows].float(), labels[rows]).to(hidden.dtype)
    return log_probs


def likelihoods(hidden, rows, score):
    token_logps = torch.zeros(len(rows), dtype=hidden.dtype)  # <-
    for i, row in enumerate(rows):
        token_logps[i] = score(hidden[row]).float().sum()
    return token_logps
""",
    ),
    "log-probabilities of limited logits, and entropies of others": (
        "softmax-in-half",
        """
import policies


def divergence(logits, target, factor):
    ours = F.log_softmax((logits * factor).clamp(-50, 50), dim=-1)  # <-
    return F.kl_div(ours, target.float(), reduction="none")


def uncertainty(model, batch):
    logits = model(batch).logits
    return policies.entropy_from_logits(logits)  # <-
""",
    ),
    "sums along a sequence": (
        "half-running-sum",
        """
def decays(gate):
    return F.logsigmoid(gate).cumsum(-1)  # <-


def gradients(query, key, d_query, d_key):
    difference = (query * d_query - key * d_key).sum(-1)
    return difference.flip(-1).cumsum(-1).flip(-1)  # <-
""",
    ),
    "the weight of a focal loss": (
        "loss-on-half-logits",
        """
def focal(logits, target, gamma):
    p = logits.sigmoid()  # <-
    error = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return ((1 - torch.where(target == 1, p, 1 - p)) ** gamma * error).mean()


def weighed(logits, target):
    p = torch.softmax(logits, dim=-1).gather(-1, target[:, None])[:, 0]  # <-
    return (F.cross_entropy(logits.float(), target, reduction="none") * (1 - p).pow(2)).mean()
""",
    ),
    "logits that are shifted": (
        "loss-on-half-logits",
        """
class Loss:
    def __init__(self):
        self.criterion = nn.CrossEntropyLoss()

    def __call__(self, *given):
        labels, lm_logits = self.unpacked(given)
        return self.criterion(lm_logits.flatten(0, 1), labels.flatten())  # <-


def next_token(outputs, labels):
    shift_logits = logits_of(outputs, labels)
    return F.cross_entropy(shift_logits.flatten(0, 1), labels[..., 1:].flatten())  # <-
""",
    ),
    "scores of a function that nobody read": (
        "mask-constant-overflow",
        """
class Attention(Relation):
    def attend(self, query, key, hidden):
        scores = self.attention_scores(query, key)
        return scores.masked_fill(hidden, -1e9).softmax(-1)  # <-


class Margin:
    def second(self, x, label):
        gap = self.get_logits(x)
        gap = gap - gap[:, :1]
        gap[torch.arange(len(x)), label] = 1e10  # <-
        return gap.abs().min(1)
""",
    ),
    "masks that are cast, and values that a mask hides": (
        "mask-constant-overflow",
        """
def bias(attention_mask, dtype):
    return torch.where(attention_mask > 0, 0.0, -1e10).to(dtype)  # <-


def spread(attention_mask, x):
    return ((1.0 - attention_mask[:, None].float()) * -1e9).to(x.dtype)  # <-


def pooled(embeddings, mask):
    embeddings[mask == 0] = -1e9  # <-
    return embeddings.max(1)[0]


def best(emissions, mask):
    return emissions.masked_fill(~mask, -1e9).amax(1)  # <-
""",
    ),
    "areas of boxes": (
        "scale-after-matmul",
        """
import numpy as np


def large(boxes, limits):
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])  # <-
    return torch.where(area > np.maximum(*limits), area, 0)


def area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])  # <-


def overlap(bboxes, shared):
    left, top, right, bottom = bboxes.unbind(-1)
    return shared / ((right - left).clamp(min=0) * (bottom - top).clamp(min=0))  # <-
""",
    ),
    "similarities of vectors": (
        "norm-without-upcast",
        """
def similar(x, y):
    return F.cosine_similarity(x, y, dim=-1)  # <-


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.cosine = nn.CosineSimilarity(dim=-1)

    def forward(self, x, y):
        return 1 - self.cosine(x, y)  # <-
""",
    ),
    "norms of whole tensors": (
        "half-gradient-norm",
        """
def rescaled(tensor, mask):
    kept = tensor * mask
    return kept * (tensor.norm() / kept.norm().clamp(min=1e-5))  # <-


def size(weight):
    return weight.abs().sum()  # <-
""",
    ),
}

SOUND = {
    "variances in fp32, and differences of other things": """
class Pooling(nn.Module):
    def forward(self, frames, scores):
        frames, share = frames.float(), scores.float().softmax(dim=2)
        mean = torch.sum(share * frames, dim=2)
        return (torch.sum(frames**2 * share, dim=2) - mean**2).clamp(min=1e-5).sqrt()


def merged(mean, square_mean):
    return square_mean.float() - mean.float() ** 2


def distance(x, centre, mean):
    return (x * centre).sum(-1) - mean**2
""",
    "what two functions make, and sums over two counts": """
def contrast(image, blur, sharpen):
    return blur(image**2) - sharpen(image) ** 2


def spread(x, seen, all_of):
    return x.square().sum(1) / seen - (x.sum(1) / all_of) ** 2
""",
    "distances in fp32, and sums that are no distances": """
def nearest(latents, table):
    latents, table = latents.float(), table.float()
    return (latents.pow(2).sum(1, keepdim=True) - 2 * latents @ table.t() + table.pow(2).sum(1)).argmin(1)


def mixed(x, y, weight):
    return x.pow(2).sum(1, keepdim=True) + y.pow(2).sum(1) + x @ weight
""",
    "sums over pixels in fp32, and numbers of them": """
def dice(logits, target):
    p, target = logits.float().sigmoid().flatten(1), target.flatten(1)
    return 1 - 2 * (p * target).sum(-1) / (p.sum(-1) + target.sum(-1))


class Accuracy:
    def seen(self, gradient, predicted, labels):
        self.score += (gradient.float() * self.delta).abs().sum().item()
        self.correct += (predicted == labels).sum().item()
""",
    "sums of gradients in fp32, and along one dimension": """
def overflows(parameters):
    return any(not torch.isfinite(each.grad.float().sum()) for each in parameters)


def rows(weight):
    return weight.grad.sum(dim=0)
""",
    "variances of other weights": """
def mixed(x, left, right):
    return (left * x**2).sum(-1) - (right * x).sum(-1) ** 2
""",
    "losses that are summed up in fp32, or along one dimension": """
def reduced(losses, count):
    return losses.sum(dtype=torch.float32) / count


def per_sample(losses):
    return losses.sum(dim=1)


def weighed(output, target):
    return F.binary_cross_entropy_with_logits(output.float(), target, reduction="none").sum()


def masked(losses, mask):
    return (losses * mask).sum()
""",
    "masks that are counted as they are, and terms that are summed in fp32": """
def pooled(hidden, padding_mask):
    count = padding_mask.sum(1, keepdim=True)
    return torch.einsum("btc,bt->bc", hidden, padding_mask.to(hidden.dtype)) / count


def weighed(hidden, padding_mask):
    seen = padding_mask.to(torch.float32)
    return seen / seen.sum(1)


def weight_gradient(x, blocks):
    parts = torch.empty(blocks, x.shape[-1], dtype=torch.float32, device=x.device)
    fill(parts, x)
    return torch.sum(parts, dim=0).to(x.dtype)
""",
    "signal-to-noise ratios of images in fp32, or of what nobody says, and other logarithms": """
def psnr(image, target):
    error = torch.mean((image.half().float() - target.float()) ** 2)
    return 20 * torch.log10(1.0 / torch.sqrt(error))


def of_any(image, target):
    return 10 * torch.log10(1.0 / ((image - target) ** 2).mean())


def decibels(wave):
    return 20 * wave.half().abs().mean().log10()
""",
    "perplexities of losses in fp32": """
@torch.no_grad()
def perplexity(model, batches):
    losses = [F.cross_entropy(model(batch)["logits"].float().flatten(0, 1), batch.flatten()) for batch in batches]
    return torch.exp(torch.stack(losses).mean())


def focusing(logits, target):
    error = F.cross_entropy(logits.float(), target, reduction="none")
    return (1 - torch.exp(-error)) ** 2 * error
""",
    "log-probabilities in rows of fp32, and rows of something else": """
def chunked(hidden, head, labels):
    log_probs = torch.zeros(hidden.shape[0], dtype=torch.float32)
    for i, row in enumerate(hidden):
        log_probs[i] = chosen(head, row.float(), labels[i])
    return log_probs


def cleared(hidden, padding):
    log_probs = hidden.new_zeros(hidden.shape[0])
    log_probs[padding] = 0.0
    return log_probs


def gathered(hidden, order):
    rows = hidden.new_zeros(hidden.shape)
    rows[order] = hidden.flip(0)
    return rows
""",
    "entropies of fp32, and sums along a sequence in fp32 or of a mask": """
import policies


def uncertainty(model, batch):
    return policies.entropy_from_logits(model(batch).logits.float())


def decays(gate, mask):
    return F.logsigmoid(gate).cumsum(-1, dtype=torch.float32), mask.cumsum(-1)
""",
    "focal losses in fp32": """
def focal(logits, target, gamma):
    logits = logits.float()
    p = logits.sigmoid()
    error = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return ((1 - p) ** gamma * error).mean()
""",
    "scores that hold any constant, and masks": """
def attend(self, query, key, hidden):
    scores = self.attention_scores(query, key)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)


def widened(relation, query, hidden):
    attention_mask = relation.mask_of(query)
    return attention_mask.masked_fill(hidden, -1e9)
""",
    "masks that stay fp32 or fit, and values of fp32": """
def bias(attention_mask, x):
    return torch.where(attention_mask > 0, 0.0, -1e4).to(x.dtype), x + torch.where(attention_mask > 0, 0.0, -1e10)


def first(beams, embeddings, mask):
    scores = torch.zeros(beams, 4, dtype=torch.float)
    scores[:, 1:] = -1e9
    wide = embeddings.float()
    wide[mask == 0] = -1e9
    return scores, wide.masked_fill(~mask, -1e9)
""",
    "areas and similarities in fp32, of arrays, and sides of something else": """
import numpy as np


def area(boxes):
    boxes = boxes.float()
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def similar(x, y):
    return F.cosine_similarity(x.float(), y.float(), dim=-1)


def candidates(boxes, others):
    shared = np.minimum(boxes[2], others[2]) - np.maximum(boxes[0], others[0])
    return shared / ((boxes[2] - boxes[0]) * (boxes[3] - boxes[1]))


def curl(field, other):
    return (field[:, 2] - other[:, 0]) * (field[:, 3] - other[:, 1])
""",
    "norms in fp32, of rows, and of something else": """
def rescaled(tensor, mask):
    return tensor * (tensor.norm(dtype=torch.float32) / (tensor * mask).float().norm().clamp(min=1e-5))


def lengths(weight):
    return weight.norm(dim=1)


def energy(signal):
    return signal.abs().sum()
""",
    "sums of means, of rows, in the dtype that the terms have, and a difference from something else": """
def of_means(values, target):
    return F.binary_cross_entropy_with_logits(values, target, reduction="none").mean(1).sum()


def rows(values, target):
    return (values.sigmoid() * target).sum(-1)


def kept(parts):
    return parts.sum(0, dtype=parts.dtype)


def other(square_mean, width):
    return square_mean - width**2
""",
    "products of corners of two boxes, and numbers that are no mask": """
def crossed(boxes, anchors):
    return (boxes[:, 2] - anchors[:, 0]) * (boxes[:, 3] - anchors[:, 1])


def micros(seconds, x):
    return (seconds.float() * 1e6).to(x.dtype)
""",
    "weights of a loss by the distance to a target, and what weights no loss": """
def quality(logits, target):
    error = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return ((target - logits.sigmoid()) ** 2 * error).mean()


def gated(logits, x):
    return (1 - logits.sigmoid()) ** 2 * x
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = hits(tmp_path, HALVES + body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert sorted({line for line, each in found if each == rule}) == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert hits(tmp_path, HALVES + SOUND[name])[1] == []
