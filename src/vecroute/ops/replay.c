/* Start the recorded launches of a pass. recording.py writes programs; their layout stands there. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { MOST_TENSORS = 64, MOST_WORDS = 128 };
enum { KERNEL, PRODUCT };

/* cuLaunchKernel and cublasLtMatmul, as their headers declare them. */
typedef int (*Launch)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                      unsigned shared, void *stream, void **, void **extra);
typedef int (*Multiply)(void *handle, void *operation, void *alpha, void *a, void *layout_a, void *b,
                        void *layout_b, void *beta, void *c, void *layout_c, void *out, void *layout_out,
                        void *algorithm, void *workspace, size_t workspace_bytes, void *stream);

/* A reference is two words: the number of a tensor, and an offset in bytes. */
static uint64_t address(const uint64_t *reference, const uint64_t *tensors) {
    return tensors[reference[0]] + reference[1];
}

static int launch(Launch driver, const uint64_t *w, const uint64_t *tensors, void *stream) {
    uint64_t arguments[MOST_WORDS];
    size_t n_pointers = w[6], bytes = w[7], n_words = (bytes + 7) / 8;
    for (size_t k = 0; k < n_pointers; k++) arguments[k] = address(w + 8 + 2 * k, tensors);
    for (size_t k = n_pointers; k < n_words; k++) arguments[k] = w[8 + n_pointers + k];
    void *extra[] = {(void *)1, arguments, (void *)2, &bytes, 0}; /* CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE */
    return driver((void *)w[0], w[1], w[2], w[3], w[4], 1, 1, w[5], stream, 0, extra);
}

static int multiply(Multiply cublas, const uint64_t *w, const uint64_t *tensors, void *stream, void *handle) {
    void *first = (void *)address(w + 8, tensors), *second = (void *)address(w + 10, tensors);
    void *out = (void *)address(w + 12, tensors), *workspace = (void *)address(w + 14, tensors);
    return cublas(handle, (void *)w[0], (void *)w[1], first, (void *)w[2], second, (void *)w[3], (void *)w[4],
                  out, (void *)w[5], out, (void *)w[5], (void *)w[6], workspace, w[7], stream);
}

/* run(program, stream, handle, *addresses): 0, or (k + 1) << 32 | status if command k fails. */
static PyObject *run(PyObject *module, PyObject *const *given, Py_ssize_t n) {
    uint64_t values[MOST_TENSORS + 3];
    if (n < 3 || n > MOST_TENSORS + 3) return PyErr_Format(PyExc_TypeError, "run takes 3 to 67 numbers, got %zd", n);
    for (Py_ssize_t k = 0; k < n; k++) values[k] = PyLong_AsUnsignedLongLong(given[k]);
    if (PyErr_Occurred()) return NULL;
    const uint64_t *program = (const uint64_t *)values[0], *tensors = values + 3, *command = program + 3;
    void *stream = (void *)values[1], *handle = (void *)values[2];
    uint64_t failed = 0;
    Py_BEGIN_ALLOW_THREADS /* a launch waits while the queue of the device is full */
    for (uint64_t k = 0; k < program[0] && !failed; k++) {
        const uint64_t *words = command + 2;
        int status = command[0] == KERNEL ? launch((Launch)program[1], words, tensors, stream)
                                          : multiply((Multiply)program[2], words, tensors, stream, handle);
        if (status) failed = (k + 1) << 32 | (uint32_t)status;
        command += command[1];
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(failed);
}

static PyMethodDef methods[] = {{"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "vecroute_replay", NULL, -1, methods};
PyMODINIT_FUNC PyInit_vecroute_replay(void) { return PyModule_Create(&definition); }
