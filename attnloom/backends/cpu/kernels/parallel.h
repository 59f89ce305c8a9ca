// Runs tasks on torch's threads: torch_parallel_for, a C symbol of libtorch, obeys
// torch.set_num_threads and costs about a microsecond a region.
//
// torch splits a range statically; tasks of unequal cost want the next free worker instead. So the
// range given to torch is the workers, and workers draw tasks from a shared counter.
#ifndef ATTNLOOM_PARALLEL_H
#define ATTNLOOM_PARALLEL_H

#include "args.h"

// While it lives, results below the smallest normal number become zero; operands are left alone.
// Probabilities of far keys are such results, and Intel's cores take 150 cycles for each: ALiBi's
// backward at S=2048 took 370 ms instead of 94.
struct FlushToZero {
#if defined(__x86_64__)
    u32 before;

    FlushToZero() {
        asm volatile("stmxcsr %0" : "=m"(before));
        u32 flushing = before | 0x8000;
        asm volatile("ldmxcsr %0" : : "m"(flushing) : "memory");
    }
    ~FlushToZero() { asm volatile("ldmxcsr %0" : : "m"(before) : "memory"); }
#endif
};

// Shapes the thread's matrix tiles while it lives: each has 16 rows of 64 bytes. They are let go of
// at the end, as a thread that holds tiles has 8 KB more to save when it is switched.
struct ShapedTiles {
#if BF16_AMX
    struct Shapes {
        u8 palette, start_row, reserved[14];
        u16 row_bytes[16];
        u8 rows[16];
    };

    ShapedTiles() {
        Shapes shapes = {1};
        for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~ShapedTiles() { asm volatile("tilerelease" : :); }
#endif
};

// body(worker, task): `worker` names private scratch; tasks are drawn in ascending order.
template <class Body> struct TaskQueue {
    const Body& body;
    i64 num_tasks;
    i64 next;
    int overflow;

    static void work(i64 begin, i64 end, void* context) {
        TaskQueue& queue = *(TaskQueue*)context;
        narrow_overflow() = 0;
        FlushToZero scope;
        ShapedTiles tiles;
        for (i64 worker = begin; worker < end; worker++) {
            for (;;) {
                i64 task = __atomic_fetch_add(&queue.next, 1, __ATOMIC_RELAXED);
                if (task >= queue.num_tasks) break;
                queue.body(worker, task);
            }
        }
        if (narrow_overflow()) __atomic_store_n(&queue.overflow, 1, __ATOMIC_RELAXED);
    }
};

INLINE i64 num_workers(const AttentionArgs& args) {
    return args.parallel_for ? max_i64(1, args.num_threads) : 1;
}

// Returns 1 if a task met a captured integer that needs wider lanes.
template <class Body> static int run_tasks(const AttentionArgs& args, i64 num_tasks,
                                           const Body& body) {
    TaskQueue<Body> queue = {body, num_tasks, 0, 0};
    i64 workers = min_i64(num_workers(args), num_tasks);
    if (workers > 1)
        args.parallel_for(0, workers, 1, TaskQueue<Body>::work, &queue);
    else if (workers == 1)
        TaskQueue<Body>::work(0, 1, &queue);
    return queue.overflow;
}

#endif
