"""What runs on a device: numpy, OpenCV, MNN and the standard library only."""
