"""Choices: which candidate is tried first. One small file a policy, made of shared parts."""
