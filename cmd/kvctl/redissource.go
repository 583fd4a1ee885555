package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"
)

// redisScanCount is how many keys Redis looks at for an answer to SCAN: large enough to hide the network, small enough not to hold up its
// only thread for long.
const redisScanCount = 1000

// redisReadBytes bounds the values of one round trip, except that one value is always read.
const redisReadBytes = 1 << 20

// isRedis tells the address of a Redis from the name of a file.
func isRedis(name string) bool {
	return strings.HasPrefix(name, "redis://") || strings.HasPrefix(name, "rediss://")
}

// redisSource reads the strings of a database of Redis. SCAN returns every key that exists all the time at least once; one that was returned
// twice is imported twice, with the value that it has then.
type redisSource struct {
	client *redisClient
	skip   bool // leave out what is not a string
	report io.Writer

	skipped map[string]int // keys by type
	pull    func() (record, error, bool)
	stop    func()
	count   int
}

// openRedis connects to a Redis. The name by which messages call it has no password.
func openRedis(ctx context.Context, address string, skip bool, report io.Writer) (s *redisSource, called string, err error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, "", usageError{errors.New("the address of the Redis is not a URL; expected redis://USER:PASSWORD@HOST:PORT/DATABASE")}
	}
	if u.Port() == "" {
		u.Host = strings.TrimSuffix(u.Host, ":") + ":" + redisDefaultPort
	}
	client, err := newRedisClient(u)
	if err != nil {
		return nil, "", usageError{fmt.Errorf("%s: %w", u.Redacted(), err)}
	}
	s = &redisSource{client: client, skip: skip, report: report, skipped: map[string]int{}}
	answers, err := client.do(ctx, redisCommand{"PING"})
	if err == nil {
		_, err = redis.String(answers[0], nil)
	}
	if err != nil {
		client.close()
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
	return r, s.count, err
}

func (s *redisSource) close() {
	s.stop()
	s.client.close()
	for _, kind := range slices.Sorted(maps.Keys(s.skipped)) {
		_, _ = fmt.Fprintf(s.report, "%d keys of type %s were left out\n", s.skipped[kind], kind)
	}
}

func (s *redisSource) records(ctx context.Context, yield func(record, error) bool) {
	for cursor := "0"; ; {
		keys, next, err := s.scan(ctx, cursor)
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
		if cursor = next; cursor == "0" {
			return
		}
	}
}

// scan returns the next keys, and the cursor of those after them.
func (s *redisSource) scan(ctx context.Context, cursor string) (keys []string, next string, err error) {
	answers, err := s.client.do(ctx, redisCommand{"SCAN", cursor, "COUNT", redisScanCount})
	if err != nil {
		return nil, "", err
	}
	parts, err := redis.Values(answers[0], nil)
	if err != nil {
		return nil, "", err
	}
	_, err = redis.Scan(parts, &next, &keys)
	return keys, next, err
}

// redisKey is the key of a string.
type redisKey struct {
	name      string
	bytes     int64  // of its value
	expiresAt uint64 // milliseconds since 1970; 0: never
}

// measure asks for the lengths and the deadlines of strings, and counts what is not a string.
func (s *redisSource) measure(ctx context.Context, keys []string) ([]redisKey, error) {
	commands := make([]redisCommand, 0, 2*len(keys))
	for _, key := range keys {
		commands = append(commands, redisCommand{"STRLEN", key}, redisCommand{"PTTL", key})
	}
	asked := time.Now() // so that a deadline is never later than in Redis
	answers, err := s.client.do(ctx, commands...)
	if err != nil {
		return nil, err
	}
	found := make([]redisKey, 0, len(keys))
	for i, key := range keys {
		length, err := redis.Int64(answers[2*i], nil)
		if isWrongType(err) {
			err = s.unsupported(ctx, key)
			length = -1
		}
		if err != nil {
			return nil, err
		}
		lifetime, err := redis.Int64(answers[2*i+1], nil)
		if err != nil {
			return nil, err
		}
		if length < 0 {
			continue
		}
		k := redisKey{name: key, bytes: length}
		if lifetime >= 0 { // zero: it ends within this millisecond
			k.expiresAt = uint64(asked.UnixMilli() + lifetime)
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
	commands := make([]redisCommand, count)
	for i := range commands {
		commands[i] = redisCommand{"GET", keys[i].name}
	}
	answers, err := s.client.do(ctx, commands...)
	if err != nil {
		return nil, nil, err
	}
	for i, answer := range answers {
		value, err := redis.Bytes(answer, nil)
		if errors.Is(err, redis.ErrNil) { // deleted since
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
	answers, err := s.client.do(ctx, redisCommand{"TYPE", key})
	if err != nil {
		return err
	}
	kind, err := redis.String(answers[0], nil)
	if err != nil {
		return err
	}
	if !s.skip {
		return fmt.Errorf("key %q is a %s; only strings can be imported; --skip-unsupported leaves other keys out", key, kind)
	}
	s.skipped[kind]++
	return nil
}
