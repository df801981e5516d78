"""Jupiter (paper 004): several small computers run one model as a pipeline of stages."""
