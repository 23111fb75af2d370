"""Steering and capturing on a stock `vllm serve`: what a folder of bundles holds, who may use it, and what a request asks."""
