"""The source front end: from bytes to the timelines that a program can have. It never imports or runs what it reads.

How a file is read, a module a step:

``screen``      its bytes: does it name torch and anything that a check listens to? Most files end here.
``parsing``     its text and its ast, with the true places of syntax errors: the tree that everything below is made from.
``outline``     what it defines, names and imports: which functions can matter, and which names the tests around precision ask for.
                Bodies of all other functions are never interpreted.
``lower``       the ast to the program tree (``program``): calls and choices pulled out of expressions, so that only instructions fork.
``liveness``    which variables nothing mentions any more, instruction by instruction.
``interpret``   the abstract interpreter (with ``statements``, ``calls``, ``imports``, and for expressions ``evaluate``, ``operators``,
                ``objects``): it follows each path and tells the checks of every event. What an outside call does stands in ``effects``,
                whose names come from rules/frameworks.toml.
``state``       one path: scopes, objects, what its conditions decided, the states of all checks. Equal paths are one (``merge``);
                opposite decisions are forgotten without loss; what nothing can reach is collected (``garbage``); differences that no test
                around precision asks for are forgotten (``blur``); above a bound paths are left out, never made up (``thinning``).
                What precision has nothing to do with is not run at all: branches by their text (``inert``), calls that were seen to do
                nothing (``repeats``).
``reading``     the roots of a file: its top level, functions that nothing calls, classes (``__init__``, then the methods). Each is read on
                few paths to its end, then again on as many as its budget has room for.
``run``         many files: each is a program of its own. Where a proof ends in another file, the finding stands at the call in this one,
                unless that other file shows it by itself: so one fault is told once, however many files were named.

Two shapes differ from the first design. Whole syntax trees are interpreted through a program tree of about thirty node types rather than
directly: paths fork at instructions only, which is what makes states mergeable. And relevance is decided by name on an outline rather
than on lowered modules: most files that an import leads to are never lowered.

Beside the programs stand ``flow``, which follows the values of single functions with their dtypes and forks nothing, and what changes a
file's text: ``fixes``, ``fix_trees``, ``names`` and ``requirements``.

Nothing that reads uses libcst. A lossless tree is needed to edit a file, not to read it, and importing libcst alone takes longer than
reading a training script; only the fixes import it.
"""
