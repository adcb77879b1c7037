"""What a conversion cost: errors module by module and through the depth, accuracy on a text, time and memory."""
