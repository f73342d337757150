import minisgl_kit as minisgl_kit  # what it sets must come before gRPC
