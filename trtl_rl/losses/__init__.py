"""The objectives: one short file each, with the formula and its source. ``loss.make_loss`` chooses by name."""
