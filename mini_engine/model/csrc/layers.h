// What attention.c takes from layers.c.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/layernorm.cpp

#pragma once

// x, weight, y [size]; y may be x
void rms_norm_row(const float *x, const float *weight, float *y, long size, float eps);
