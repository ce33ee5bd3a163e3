"""Data of the formats that training scripts are pointed at: MNIST's files, and folders of images as ImageNet's."""
