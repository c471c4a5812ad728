// What kernels.cu includes by this name.
#pragma once

#include "cuda_on_cpu.h"
