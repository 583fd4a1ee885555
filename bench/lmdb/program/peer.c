// An LMDB environment of random pairs, read and written through the library's C interface; keys and values are copied out.
//
//   peer DIR KEYS VALUE_BYTES
//
// Prints "ready" when KEYS pairs are loaded. Then a line "WORK THREADS COUNT" makes each thread do COUNT operations, and is answered with
// how many all threads did. It ends with its input. Nothing is synced. WORK is
//
//   get, scan, all          point reads; scans of 100 from random keys; entries of whole scans
//   put, batch              overwrites of random keys, a transaction each; 100 a transaction, counted by key
//   parts                   the key range has COUNT parts now: put and batch overwrite keys of the first
//   insert                  new keys, a transaction each
//   hold                    overwrites every key with the number of states held so far, a transaction each, and holds the state
//   newest, oldest, number  reads of random keys: of the newest state, of the first that is held; overwrites with ever larger numbers
//   check                   counts the held states in which a key has the state's number; COUNT says nothing
#include <lmdb.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { keyBytes = 16, scanEntries = 100, threadsMax = 256, heldMax = 16384, batch = 10000 };

static MDB_env *env;
static MDB_dbi dbi;
static long keys;
static size_t valueBytes;
static uint64_t parts = 1;

// States that are held, from the oldest on.
static MDB_txn *held[heldMax];
static long holds;

struct job {
	pthread_t thread;
	void (*work)(struct job *);
	long count, done;
	uint64_t seed;
	long number, of; // of the thread, and of how many
	uint8_t *value;  // room for one
};

static void fail(const char *what, long i) {
	fprintf(stderr, "lmdb: %s %ld\n", what, i);
	exit(1);
}

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

static MDB_txn *begin(unsigned flags) {
	MDB_txn *txn;
	check(mdb_txn_begin(env, NULL, flags, &txn), "begin");
	return txn;
}

// put gives key i a value that begins with number.
static void put(MDB_txn *txn, uint8_t *v, uint64_t i, long number) {
	uint8_t k[keyBytes];
	keyOf(k, i);
	memcpy(v, &number, sizeof number);
	MDB_val key = {keyBytes, k}, value = {valueBytes, v};
	check(mdb_put(txn, dbi, &key, &value, 0), "put");
}

// compare copies key i's value to v and compares the number with which it begins.
static void compare(MDB_txn *txn, uint8_t *v, uint64_t i, long number) {
	uint8_t k[keyBytes];
	keyOf(k, i);
	MDB_val key = {keyBytes, k}, value;
	check(mdb_get(txn, dbi, &key, &value), "get");
	memcpy(v, value.mv_data, value.mv_size);
	if (value.mv_size != valueBytes || memcmp(v, &number, sizeof number))
		fail("wrong value for key", i);
}

static void load(void) {
	uint8_t *v = calloc(1, valueBytes);
	MDB_txn *txn = begin(0);
	check(mdb_dbi_open(txn, NULL, 0, &dbi), "open");
	for (long i = 0; i < keys;) {
		for (long end = i + batch; i < end && i < keys; i++)
			put(txn, v, i, i);
		check(mdb_txn_commit(txn), "commit");
		txn = begin(0);
	}
	check(mdb_txn_commit(txn), "commit");
	free(v);
}

// renewed has a reader see the newest state.
static MDB_txn *renewed(MDB_txn *txn) {
	mdb_txn_reset(txn);
	check(mdb_txn_renew(txn), "renew");
	return txn;
}

// get reads single keys, each at the newest state, as a server would for as many requests.
static void get(struct job *j) {
	MDB_txn *txn = begin(MDB_RDONLY);
	for (; j->done < j->count; j->done++) {
		uint64_t i = mix(j->seed++) % keys;
		compare(renewed(txn), j->value, i, i);
	}
	mdb_txn_abort(txn);
}

// visit copies up to most entries out, from key on, or from the first if it is null.
static long visit(MDB_cursor *cursor, uint8_t *k, uint8_t *v, long most) {
	uint8_t name[keyBytes];
	MDB_val key = {keyBytes, k}, value;
	int rc = mdb_cursor_get(cursor, &key, &value, k ? MDB_SET_RANGE : MDB_FIRST);
	long n = 0;
	for (; rc == 0 && n < most; n++) {
		memcpy(name, key.mv_data, key.mv_size);
		memcpy(v, value.mv_data, value.mv_size);
		rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT);
	}
	return n;
}

static void scans(struct job *j, int whole) {
	uint8_t k[keyBytes];
	MDB_txn *txn = begin(MDB_RDONLY);
	MDB_cursor *cursor;
	check(mdb_cursor_open(txn, dbi, &cursor), "cursor");
	while (j->done < j->count) {
		if (whole) {
			long left = j->count - j->done;
			j->done += visit(cursor, NULL, j->value, left < keys ? left : keys);
			continue;
		}
		keyOf(k, mix(j->seed++) % keys);
		visit(cursor, k, j->value, scanEntries);
		j->done++;
	}
	mdb_cursor_close(cursor);
	mdb_txn_abort(txn);
}

static void scan(struct job *j) { scans(j, 0); }
static void all(struct job *j) { scans(j, 1); }

// putEach gives random keys the value that they have, so many in each transaction.
static void putEach(struct job *j, int each) {
	while (j->done < j->count) {
		MDB_txn *txn = begin(0);
		for (int n = 0; n < each && j->done < j->count; n++, j->done++) {
			uint64_t i;
			do
				i = mix(j->seed++) % keys;
			while (mix(i) > UINT64_MAX / parts);
			put(txn, j->value, i, i);
		}
		check(mdb_txn_commit(txn), "commit");
	}
}

static void single(struct job *j) { putEach(j, 1); }
static void batches(struct job *j) { putEach(j, scanEntries); }

static void insert(struct job *j) {
	for (; j->done < j->count; j->done++) {
		uint64_t i = keys + j->number + j->done * j->of;
		MDB_txn *txn = begin(0);
		put(txn, j->value, i, i);
		check(mdb_txn_commit(txn), "commit");
	}
}

static void setParts(struct job *j) { parts = j->count; }

static void hold(struct job *j) {
	for (; j->done < j->count && holds < heldMax; j->done++) {
		MDB_txn *txn = begin(0);
		for (long i = 0; i < keys; i++)
			put(txn, j->value, i, holds);
		check(mdb_txn_commit(txn), "commit");
		held[holds++] = begin(MDB_RDONLY);
	}
}

static void newest(struct job *j) {
	MDB_txn *txn = begin(MDB_RDONLY);
	for (; j->done < j->count; j->done++)
		compare(renewed(txn), j->value, mix(j->seed++) % keys, holds - 1);
	mdb_txn_abort(txn);
}

static void oldest(struct job *j) {
	for (; j->done < j->count; j->done++)
		compare(held[0], j->value, mix(j->seed++) % keys, 0);
}

static void number(struct job *j) {
	for (; j->done < j->count; j->done++) {
		MDB_txn *txn = begin(0);
		put(txn, j->value, mix(j->seed++) % keys, holds + j->done);
		check(mdb_txn_commit(txn), "commit");
	}
}

static void checkHeld(struct job *j) {
	for (; j->done < holds; j->done++)
		compare(held[j->done], j->value, j->done % keys, j->done);
}

static const struct {
	const char *name;
	void (*work)(struct job *);
} works[] = {
	{"get", get},   {"scan", scan},     {"all", all},       {"put", single},    {"batch", batches},  {"insert", insert},
	{"hold", hold}, {"newest", newest}, {"oldest", oldest}, {"number", number}, {"check", checkHeld},
	{"parts", setParts},
};

static void *run(void *job) {
	struct job *j = job;
	j->work(j);
	return NULL;
}

static long serve(void (*work)(struct job *), int threads, long count) {
	static struct job jobs[threadsMax];
	static uint64_t seed;
	long done = 0;
	for (int i = 0; i < threads; i++) {
		jobs[i] = (struct job){.work = work, .count = count, .seed = mix(seed++), .number = i, .of = threads, .value = calloc(1, valueBytes)};
		check(pthread_create(&jobs[i].thread, NULL, run, &jobs[i]), "thread");
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(jobs[i].thread, NULL);
		free(jobs[i].value);
		done += jobs[i].done;
	}
	if (work == insert)
		keys += done;
	return done;
}

int main(int argc, char **argv) {
	if (argc != 4 || (keys = atol(argv[2])) < 0 || (valueBytes = atol(argv[3])) < sizeof keys) {
		fprintf(stderr, "usage: %s DIR KEYS VALUE_BYTES\n", argv[0]);
		return 2;
	}
	check(mdb_env_create(&env), "create");
	check(mdb_env_set_mapsize(env, ((size_t)16 << 30) + (size_t)keys * 1024), "mapsize");
	check(mdb_env_set_maxreaders(env, heldMax + threadsMax), "maxreaders");
	check(mdb_env_open(env, argv[1], MDB_NOSYNC | MDB_NOTLS, 0644), "open");
	load();
	puts("ready");
	fflush(stdout);
	char what[8];
	int threads;
	long count;
	while (scanf("%7s %d %ld", what, &threads, &count) == 3) {
		size_t w = 0;
		while (w < sizeof works / sizeof *works && strcmp(works[w].name, what))
			w++;
		if (w == sizeof works / sizeof *works || threads < 1 || threads > threadsMax)
			return 2;
		printf("%ld\n", serve(works[w].work, threads, count));
		fflush(stdout);
	}
	mdb_env_close(env);
	return 0;
}
