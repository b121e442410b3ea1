"""Where models live: the device side, the lab that reaches devices, later the gateway."""
