// Loads an LMDB environment with random pairs and reads them through the library's C interface, copying keys and values out.
//
//   reader DIR KEYS
//
// Prints "ready" when loaded. Then a line "get|scan|all|put|batch THREADS COUNT" makes each thread do COUNT operations (point reads,
// scans of 100, entries of whole scans, puts of a transaction each, puts of 100 a transaction), and is answered with the number of operations, or of entries for all. It ends with its input.
#include <lmdb.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { keyBytes = 16, valueBytes = 100, scanEntries = 100, threadsMax = 64, batch = 10000 };

static MDB_env *env;
static MDB_dbi dbi;
static long keys;

struct job {
	pthread_t thread;
	char what;
	long count, done;
	uint64_t seed;
};

static void check(int rc, const char *where) {
	if (rc) {
		fprintf(stderr, "lmdb: %s: %s\n", where, mdb_strerror(rc));
		exit(1);
	}
}

static uint64_t mix(uint64_t x) {
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static void keyOf(uint8_t *k, uint64_t i) {
	uint64_t high = __builtin_bswap64(mix(i)), low = __builtin_bswap64(i);
	memcpy(k, &high, 8);
	memcpy(k + 8, &low, 8);
}

static void load(void) {
	uint8_t k[keyBytes], v[valueBytes] = {0};
	for (long i = 0; i < keys;) {
		MDB_txn *txn;
		check(mdb_txn_begin(env, NULL, 0, &txn), "begin");
		check(mdb_dbi_open(txn, NULL, 0, &dbi), "open");
		for (long end = i + batch; i < end && i < keys; i++) {
			keyOf(k, i);
			memcpy(v, &i, sizeof i);
			MDB_val key = {keyBytes, k}, value = {valueBytes, v};
			check(mdb_put(txn, dbi, &key, &value, 0), "put");
		}
		check(mdb_txn_commit(txn), "commit");
	}
}

// get reads single keys, each at the newest state, as a server would for as many requests.
static void get(struct job *j, MDB_txn *txn) {
	uint8_t k[keyBytes], out[valueBytes];
	for (; j->done < j->count; j->done++) {
		uint64_t i = mix(j->seed++) % keys;
		keyOf(k, i);
		MDB_val key = {keyBytes, k}, value;
		mdb_txn_reset(txn);
		check(mdb_txn_renew(txn), "renew");
		check(mdb_get(txn, dbi, &key, &value), "get");
		memcpy(out, value.mv_data, value.mv_size);
		if (memcmp(out, &i, sizeof i)) {
			fprintf(stderr, "lmdb: wrong value for key %lu\n", (unsigned long)i);
			exit(1);
		}
	}
}

// visit copies up to most entries out, from key on, or from the first if it is null.
static long visit(MDB_cursor *cursor, uint8_t *k, long most) {
	uint8_t out[keyBytes + valueBytes];
	MDB_val key = {keyBytes, k}, value;
	int rc = mdb_cursor_get(cursor, &key, &value, k ? MDB_SET_RANGE : MDB_FIRST);
	long n = 0;
	for (; rc == 0 && n < most; n++) {
		memcpy(out, key.mv_data, key.mv_size);
		memcpy(out + keyBytes, value.mv_data, value.mv_size);
		rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT);
	}
	return n;
}

static void scans(struct job *j, MDB_txn *txn) {
	uint8_t k[keyBytes];
	MDB_cursor *cursor;
	check(mdb_cursor_open(txn, dbi, &cursor), "cursor");
	while (j->done < j->count) {
		if (j->what == 'a') {
			long left = j->count - j->done;
			j->done += visit(cursor, NULL, left < keys ? left : keys);
			continue;
		}
		keyOf(k, mix(j->seed++) % keys);
		visit(cursor, k, scanEntries);
		j->done++;
	}
	mdb_cursor_close(cursor);
}

// putKeys gives random keys the value that they have, so many in each transaction. Nothing is synced.
static void putKeys(struct job *j, int each) {
	uint8_t k[keyBytes], v[valueBytes] = {0};
	while (j->done < j->count) {
		MDB_txn *txn;
		check(mdb_txn_begin(env, NULL, 0, &txn), "begin");
		for (int n = 0; n < each && j->done < j->count; n++, j->done++) {
			uint64_t i = mix(j->seed++) % keys;
			keyOf(k, i);
			memcpy(v, &i, sizeof i);
			MDB_val key = {keyBytes, k}, value = {valueBytes, v};
			check(mdb_put(txn, dbi, &key, &value, 0), "put");
		}
		check(mdb_txn_commit(txn), "commit");
	}
}

static void *run(void *arg) {
	struct job *j = arg;
	MDB_txn *txn;
	if (j->what == 'p' || j->what == 'b') {
		putKeys(j, j->what == 'b' ? scanEntries : 1);
		return NULL;
	}
	check(mdb_txn_begin(env, NULL, MDB_RDONLY, &txn), "begin");
	if (j->what == 'g')
		get(j, txn);
	else
		scans(j, txn);
	mdb_txn_abort(txn);
	return NULL;
}

static long serve(char what, int threads, long count) {
	static struct job jobs[threadsMax];
	static uint64_t seed;
	long done = 0;
	for (int i = 0; i < threads; i++) {
		jobs[i] = (struct job){.what = what, .count = count, .seed = mix(seed++)};
		check(pthread_create(&jobs[i].thread, NULL, run, &jobs[i]), "thread");
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(jobs[i].thread, NULL);
		done += jobs[i].done;
	}
	return done;
}

int main(int argc, char **argv) {
	if (argc != 3 || (keys = atol(argv[2])) <= 0) {
		fprintf(stderr, "usage: %s DIR KEYS\n", argv[0]);
		return 2;
	}
	check(mdb_env_create(&env), "create");
	check(mdb_env_set_mapsize(env, (size_t)1 << 20 | (size_t)keys * 1024), "mapsize");
	check(mdb_env_open(env, argv[1], MDB_NOSYNC | MDB_NOTLS, 0644), "open");
	load();
	puts("ready");
	fflush(stdout);
	char what[8];
	int threads;
	long count;
	while (scanf("%7s %d %ld", what, &threads, &count) == 3) {
		if (threads < 1 || threads > threadsMax || !strchr("gsapb", what[0]))
			return 2;
		printf("%ld\n", serve(what[0], threads, count));
		fflush(stdout);
	}
	mdb_env_close(env);
	return 0;
}
