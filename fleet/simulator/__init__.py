"""Many devices that speak the real protocol, drawn from recorded phones and boards."""
