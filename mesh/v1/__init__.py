"""Generated from proto/mesh/v1. Do not edit."""
