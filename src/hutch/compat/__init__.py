"""Drop-in replacements: programs written for another system keep running, on boxes."""
