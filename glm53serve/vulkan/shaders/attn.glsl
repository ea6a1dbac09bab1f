// The i-th token a row attends to, in ascending order.
layout(set = 1, binding = 2) readonly buffer L { uint chosen[]; };    // [rows, keep]
layout(set = 1, binding = 3) readonly buffer C { vec4 latents4[]; };  // [slots, capacity, rp]
layout(push_constant) uniform Push { uint heads, rp, ts, capacity, kpool, budget, keep; float root_d; uint splits, rows; } p;
uint g_row, g_pos, g_count, g_head0, g_place;
bool g_all;
void open_row() {
    g_row = gl_WorkGroupID.z;
    g_pos = row_pos(g_row);
    g_all = sees_all(g_pos, p.budget, p.kpool);
    g_count = seen(g_pos, p.budget, p.kpool);
    g_place = row_slot(g_row) * p.capacity;
}
uint token(uint i) {
    if (g_all) return i;
    if (i < p.budget) return chosen[g_row * p.keep + i / p.kpool] * p.kpool + i % p.kpool;
    return complete_pools(g_pos, p.kpool) * p.kpool + i - p.budget;
}
