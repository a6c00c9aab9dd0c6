"""Bytes between processes of one machine: memfd segments, rings, doorbells, frames, and the control lane."""
