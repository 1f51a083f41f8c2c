"""From conversations to trained heads."""
