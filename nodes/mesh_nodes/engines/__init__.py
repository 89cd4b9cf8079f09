"""The engines that a node may have, and which of them it takes."""
