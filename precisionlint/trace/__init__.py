"""The run-time front end: records the one timeline that a training step did have. It needs torch, and never imports
source/.
"""
