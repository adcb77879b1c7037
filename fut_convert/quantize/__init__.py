"""Pure functions that turn weights into codes and scales: tensors in, tensors out, on any torch device."""
