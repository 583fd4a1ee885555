package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// redisScanCount is how many keys Redis looks at for an answer to SCAN: large enough to hide the network, small enough not to hold up its
// only thread for long.
const redisScanCount = 1000

// redisReadBytes bounds the values of one round trip, except that one value is always read.
const redisReadBytes = 1 << 20

// redisDefaultPort is where Redis listens by default.
const redisDefaultPort = "6379"

// isRedis tells the address of a Redis from the name of a file.
func isRedis(name string) bool {
	return strings.HasPrefix(name, "redis://") || strings.HasPrefix(name, "rediss://")
}

// redisSource reads the strings of a database of Redis. SCAN returns every key that exists all the time at least once; one that was returned
// twice is imported twice, with the value that it has then.
type redisSource struct {
	client *redis.Client
	skip   bool // leave out what is not a string
	report io.Writer

	skipped map[string]int // keys by type
	pull    func() (record, error, bool)
	stop    func()
	count   int
}

// errRedisClosed ends an import from a Redis that closes each connection, as a proxy does whose Redis is down.
var errRedisClosed = errors.New("the Redis has closed the connection before all of its keys were read; import again")

// redisRun is one run of a Redis. The cursor of SCAN is a place in its hash table, which is another in each run and in each replica: with the
// cursor of another one, SCAN leaves keys out.
type redisRun struct {
	mu        sync.Mutex // connections are made by goroutines of the client
	connected bool
	id        string // empty: the Redis does not tell
}

// check is called for each new connection. A later one has to reach the same run.
func (r *redisRun) check(ctx context.Context, connection *redis.Conn) error {
	info, err := connection.Info(ctx, "server").Result()
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	id := runID(info)
	switch {
	case !r.connected:
		r.connected, r.id = true, id
	case r.id == "":
		return errors.New("the connection to the Redis was lost, and it does not tell (INFO server) whether it was restarted, so keys might be left out; import again")
	case r.id != id:
		return errors.New("the Redis was restarted, or another one has taken its place, so keys might be left out; import again")
	}
	return nil
}

// runID finds the name of the run in an answer to INFO, or nothing.
func runID(info string) string {
	for line := range strings.Lines(info) {
		if id, ok := strings.CutPrefix(line, "run_id:"); ok {
			return strings.TrimSpace(id)
		}
	}
	return ""
}

// openRedis connects to a Redis. The name by which messages call it has no password.
func openRedis(ctx context.Context, address string, skip bool, report io.Writer) (s *redisSource, called string, err error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, "", usageError{errors.New("the address of the Redis is not a URL; expected redis://USER:PASSWORD@HOST:PORT/DATABASE")}
	}
	if u.Port() == "" {
		u.Host += ":" + redisDefaultPort
	}
	options, err := redis.ParseURL(u.String())
	if err != nil {
		return nil, "", usageError{fmt.Errorf("%s: %w", u.Redacted(), err)}
	}
	if options.Password == "" {
		options.Password = os.Getenv("REDISCLI_AUTH") // as redis-cli has it
	}
	options.OnConnect = new(redisRun).check
	s = &redisSource{client: redis.NewClient(options), skip: skip, report: report, skipped: map[string]int{}}
	if err := s.client.Ping(ctx).Err(); err != nil {
		_ = s.client.Close() // it was not used
		return nil, "", fmt.Errorf("%s: %w", u.Redacted(), err)
	}
	s.pull, s.stop = iter.Pull2(func(yield func(record, error) bool) { s.records(ctx, yield) })
	return s, u.Redacted(), nil
}

func (s *redisSource) next() (record, int, error) {
	r, err, ok := s.pull()
	if !ok {
		return record{}, s.count, io.EOF
	}
	s.count++
	if errors.Is(err, io.EOF) {
		err = errRedisClosed // io.EOF would be the end of the records
	}
	return r, s.count, err
}

func (s *redisSource) close() {
	s.stop()
	_ = s.client.Close() // it was only read
	for _, kind := range slices.Sorted(maps.Keys(s.skipped)) {
		_, _ = fmt.Fprintf(s.report, "%d keys of type %s were left out\n", s.skipped[kind], kind)
	}
}

func (s *redisSource) records(ctx context.Context, yield func(record, error) bool) {
	for cursor := uint64(0); ; {
		keys, next, err := s.client.Scan(ctx, cursor, "", redisScanCount).Result()
		var found []redisKey
		if err == nil {
			found, err = s.measure(ctx, keys)
		}
		for len(found) > 0 && err == nil {
			var records []record
			if records, found, err = s.read(ctx, found); err != nil {
				break
			}
			for _, r := range records {
				if !yield(r, nil) {
					return
				}
			}
		}
		if err != nil {
			yield(record{}, err)
			return
		}
		if cursor = next; cursor == 0 {
			return
		}
	}
}

// redisKey is the key of a string.
type redisKey struct {
	name      string
	bytes     int64  // of its value
	expiresAt uint64 // milliseconds since 1970; 0: never
}

// measure asks for the lengths and the deadlines of strings, and counts what is not a string.
func (s *redisSource) measure(ctx context.Context, keys []string) ([]redisKey, error) {
	lengths, lifetimes := make([]*redis.IntCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	asked := time.Now() // so that a deadline is never later than in Redis
	_, err := s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			lengths[i], lifetimes[i] = p.StrLen(ctx, key), p.PTTL(ctx, key)
		}
		return nil
	})
	if err != nil && !isWrongType(err) {
		return nil, err
	}
	found := make([]redisKey, 0, len(keys))
	for i, key := range keys {
		length, err := lengths[i].Result()
		if isWrongType(err) {
			err = s.unsupported(ctx, key)
			length = -1
		}
		if err != nil {
			return nil, err
		}
		lifetime, err := lifetimes[i].Result()
		if err != nil {
			return nil, err
		}
		if length < 0 {
			continue
		}
		k := redisKey{name: key, bytes: length}
		if lifetime >= 0 { // zero: it ends within this millisecond
			k.expiresAt = uint64(asked.Add(lifetime).UnixMilli())
		}
		found = append(found, k)
	}
	return found, nil
}

// read reads the values of the first keys, as many as one answer should have, and returns the keys after them.
func (s *redisSource) read(ctx context.Context, keys []redisKey) (records []record, rest []redisKey, err error) {
	count, size := 0, int64(0)
	for count < len(keys) && (count == 0 || size+keys[count].bytes <= redisReadBytes) {
		size += keys[count].bytes
		count++
	}
	values := make([]*redis.StringCmd, count)
	_, err = s.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range values {
			values[i] = p.Get(ctx, keys[i].name)
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, nil, err
	}
	for i, v := range values {
		value, err := v.Bytes()
		if errors.Is(err, redis.Nil) { // deleted since
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		records = append(records, record{key: []byte(keys[i].name), value: value, expiresAt: keys[i].expiresAt})
	}
	return records, keys[count:], nil
}

func isWrongType(err error) bool { return err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE") }

// unsupported counts a key that is not a string, or says why the import ends.
func (s *redisSource) unsupported(ctx context.Context, key string) error {
	kind, err := s.client.Type(ctx, key).Result()
	if err != nil {
		return err
	}
	if !s.skip {
		return fmt.Errorf("key %q is a %s; only strings can be imported; --skip-unsupported leaves other keys out", key, kind)
	}
	s.skipped[kind]++
	return nil
}
