// Products whose rows the GPUs of a group exchange while they run: those that are there are multiplied first.
#pragma once

#include <Python.h>

#include <cstddef>

#include "exchange.h"

namespace te {

// Has a stream wait for the blocks of all other ranks.
bool await_all(PeerBuffers& buffers, size_t buffer, PeerBuffers::Stream stream, Failure& failure);

// GatherMatmul(product, peers, gives): called as product.make, with this rank's rows of a, it multiplies those of all
// ranks. MatmulScatter(product, peers): gives this rank's rows of the sum of all ranks' products. The types, or nullptr
// with a Python error set.
PyObject* make_gather_matmul_type();
PyObject* make_matmul_scatter_type();

}  // namespace te
