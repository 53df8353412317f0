"""Predicted against measured steps of real compute."""
