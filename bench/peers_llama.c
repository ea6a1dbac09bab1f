/* llama.cpp behind the line protocol of bench/peers_worker.py; compiled by bench/peers_setup.py against the peer's own headers.
 *
 *   peers_llama serve MODEL.gguf THREADS CONTEXT f16|f32      requests on stdin, one JSON object a line on stdout (the type is the KV cache's)
 *   peers_llama quantize IN.gguf OUT.gguf                     a Q4_0 file, as llama-quantize writes it
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static void fail(const char * what) {
    fprintf(stderr, "peers_llama: %s\n", what);
    exit(1);
}

static void errors_only(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

/* Compute ids[0..count) at positions start..; logits of the last row, or of all rows. */
static void compute(struct llama_context * ctx, const llama_token * ids, int start, int count, bool all) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; ++i) {
        batch.token[i] = ids[i];
        batch.pos[i] = start + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all || i == count - 1;
    }
    if (llama_decode(ctx, batch) != 0) {
        fail("llama_decode failed");
    }
    llama_synchronize(ctx);
    llama_batch_free(batch);
}

static int best(const float * logits, int vocabulary) {
    int at = 0;
    for (int i = 1; i < vocabulary; ++i) {
        if (logits[i] > logits[at]) {
            at = i;
        }
    }
    return at;
}

static void measure(struct llama_context * ctx, const llama_token * ids, int count, int prompt, int vocabulary) {
    int * argmax = malloc((size_t) (count - prompt + 1) * sizeof(int));
    double * step = malloc((size_t) (count - prompt + 1) * sizeof(double));
    llama_memory_clear(llama_get_memory(ctx), true);
    double began = seconds();
    compute(ctx, ids, 0, prompt, false);
    argmax[0] = best(llama_get_logits_ith(ctx, -1), vocabulary);
    printf("{\"prefill\": %.9f, \"steps\": [", seconds() - began);
    for (int i = prompt; i < count; ++i) {
        began = seconds();
        compute(ctx, ids + i, i, 1, false);
        argmax[i - prompt + 1] = best(llama_get_logits_ith(ctx, -1), vocabulary);
        step[i - prompt] = seconds() - began;
    }
    for (int i = 0; i < count - prompt; ++i) {
        printf("%s%.9f", i ? ", " : "", step[i]);
    }
    printf("], \"best\": [");
    for (int i = 0; i <= count - prompt; ++i) {
        printf("%s%d", i ? ", " : "", argmax[i]);
    }
    printf("]}\n");
    free(argmax);
    free(step);
}

static void logits(struct llama_context * ctx, const llama_token * ids, int count, int vocabulary, const char * path) {
    llama_memory_clear(llama_get_memory(ctx), true);
    compute(ctx, ids, 0, count, true);
    FILE * file = fopen(path, "wb");
    if (file == NULL) {
        fail("cannot write the logits");
    }
    for (int i = 0; i < count; ++i) {
        if (fwrite(llama_get_logits_ith(ctx, i), sizeof(float), (size_t) vocabulary, file) != (size_t) vocabulary) {
            fail("cannot write the logits");
        }
    }
    if (fclose(file) != 0) {
        fail("cannot write the logits");
    }
    printf("{\"rows\": %d}\n", count);
}

static int serve(const char * path, int threads, int capacity, enum ggml_type cache) {
    struct llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == NULL) {
        fail("cannot load the model");
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t) capacity;
    params.n_batch = (uint32_t) capacity;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = cache;
    struct llama_context * ctx = llama_init_from_model(model, params);
    if (ctx == NULL) {
        fail("cannot make a context");
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_token * ids = malloc((size_t) capacity * sizeof(llama_token));
    printf("{\"ready\": \"llama.cpp, %s cache\"}\n", ggml_type_name(cache));
    fflush(stdout);

    char * line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        const char * verb = strtok(line, " \n");
        const char * argument = strtok(NULL, " \n");
        int count = 0;
        for (const char * word = strtok(NULL, " \n"); word != NULL; word = strtok(NULL, " \n")) {
            if (count == capacity) {
                fail("more tokens than the context holds");
            }
            ids[count] = (llama_token) atoi(word);
            if (ids[count] < 0 || ids[count] >= vocabulary) {
                fail("token id outside the vocabulary");
            }
            ++count;
        }
        if (verb != NULL && argument != NULL && strcmp(verb, "measure") == 0 && atoi(argument) > 0 && atoi(argument) <= count) {
            measure(ctx, ids, count, atoi(argument), vocabulary);
        } else if (verb != NULL && argument != NULL && strcmp(verb, "logits") == 0 && count > 0) {
            logits(ctx, ids, count, vocabulary, argument);
        } else {
            fail("bad request");
        }
        fflush(stdout);
    }
    free(line);
    free(ids);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}

int main(int argc, char ** argv) {
    llama_log_set(errors_only, NULL);
    llama_backend_init();
    if (argc == 4 && strcmp(argv[1], "quantize") == 0) {
        struct llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
        params.nthread = 2;
        return llama_model_quantize(argv[2], argv[3], &params) == 0 ? 0 : 1;
    }
    if (argc == 6 && strcmp(argv[1], "serve") == 0) {
        return serve(argv[2], atoi(argv[3]), atoi(argv[4]), strcmp(argv[5], "f32") == 0 ? GGML_TYPE_F32 : GGML_TYPE_F16);
    }
    fail("usage: peers_llama serve MODEL THREADS CONTEXT f16|f32 | quantize IN OUT");
    return 1;
}
