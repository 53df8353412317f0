"""Planned, simulated and measured timelines, as SVG, text and Perfetto traces."""
