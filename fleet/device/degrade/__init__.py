"""What heat, battery and memory cost: sensors, governors, frames and the switch between two models."""
