// A product of each head with a matrix of its own, as latent attention has them.
//
// What must always hold: as in linear, a row does not depend on the number of rows.
#include <algorithm>
#include <cstring>

#include "../program.h"

// y: of each head, the elements of x after those that are multiplied, and then their product. Threads take some rows of one head
// at a time, each as a team of one; for so few rows, linear waits for no other thread.
void head_linear(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t rows = num_rows(op, pass), chunks = (rows + kOwnRows - 1) / kOwnRows;
    int64_t moved_from = op.first + op.num_multiplied, moved = op.width - moved_from, head_width = moved + op.out_width;
    Op one = op;
    one.on_logits_rows = 0;
    one.width = op.num_multiplied;
    Pass its = pass;
    for (int64_t item; (item = worker.next()) < op.num_heads * chunks;) {
        int64_t head = item / chunks, row = item % chunks * kOwnRows;
        its.num_tokens = std::min(kOwnRows, rows - row);
        const float* x = op.x + row * op.x_stride + head * op.width;
        float* y = op.y + row * op.y_stride + head * head_width;
        for (int64_t i = 0; i < its.num_tokens; i++) memcpy(y + i * op.y_stride, x + i * op.x_stride + moved_from, moved * sizeof(float));
        one.weight = op.matrices[head];
        one.x = x + op.first;
        one.y = y + moved;
        int64_t counter = 0;
        linear(one, its, {0, 1, &counter, worker.team, worker.shared});
    }
}
