"""From model text to safe motion: action grammar and step executor."""
