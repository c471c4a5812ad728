// Replaces CUDA's header of this name for the .cu files.
#pragma once

#include "cuda_on_cpu.h"
