"""Choices: which candidate is tried first. One small file a policy, composed of shared parts."""
