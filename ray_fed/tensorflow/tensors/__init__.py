"""Types and values of TensorFlow, and the devices that they live on."""
