"""What every picture is drawn with: a page, colours, axes, and figures whose bytes are the same every time."""
