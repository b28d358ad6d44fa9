# SPDX-License-Identifier: Apache-2.0
"""Measurements on the real vLLM engine: checkpoints, runners, memory, demo."""
