# SPDX-License-Identifier: Apache-2.0
"""A patch set for vLLM: drafts without vocabulary tables they never use.

The parts, in the order data flows through them:

- `series`: the pull requests, one module each: edits, new files, tests, text;
- `edits`: what an edit is; `rewrite` carries it out, `names` checks the outcome;
- `plan`: which pull requests apply to a given vLLM, and what its files become;
- `cache`, `importer`, `plugin`: serve the patched modules to a running vLLM;
- `diff`, `cli`: show them; `doctor`: says what a vLLM process makes of them.
"""
