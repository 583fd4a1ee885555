package peers

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// redisIndex is the sorted set of all keys, which replaces ordered keys.
const redisIndex = "index"

// swapScript is a compare-and-swap in one round trip. WATCH, GET, MULTI would take three.
var swapScript = redis.NewScript(`
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1`)

// redisStore speaks to Redis.
type redisStore struct {
	*redis.Client
	indexed bool // ranges are read
}

// dialRedis gives each of the callers a connection: unlike a gRPC client, a caller has one to itself while it waits.
func dialRedis(indexed bool) dialer {
	return func(address string) (store, error) {
		return redisStore{redis.NewClient(&redis.Options{Addr: address, PoolSize: callersMax}), indexed}, nil
	}
}

func (s redisStore) get(ctx context.Context, key []byte) ([]byte, error) {
	v, err := s.Get(ctx, string(key)).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	return v, err
}

func (s redisStore) put(ctx context.Context, key, value []byte) error {
	return s.Set(ctx, string(key), value, 0).Err()
}

func (s redisStore) insert(ctx context.Context, key, value []byte) error {
	if !s.indexed {
		return s.put(ctx, key, value)
	}
	return s.putAll(ctx, [][]byte{key}, [][]byte{value})
}

func (s redisStore) putAll(ctx context.Context, keys, values [][]byte) error {
	pairs := make([]any, 0, 2*len(keys))
	for i := range keys {
		pairs = append(pairs, keys[i], values[i])
	}
	if !s.indexed {
		return s.MSet(ctx, pairs...).Err()
	}
	members := make([]redis.Z, len(keys))
	for i := range keys {
		members[i].Member = keys[i]
	}
	_, err := s.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.MSet(ctx, pairs...)
		p.ZAdd(ctx, redisIndex, members...)
		return nil
	})
	return err
}

func (s redisStore) scan(ctx context.Context, from, to []byte, limit int) (keys, values [][]byte, err error) {
	stop := "+"
	if to != nil {
		stop = "(" + string(to)
	}
	names, err := s.ZRangeArgs(ctx, redis.ZRangeArgs{
		Key: redisIndex, Start: "[" + string(from), Stop: stop, ByLex: true, Count: int64(limit),
	}).Result()
	if err != nil || len(names) == 0 {
		return nil, nil, err
	}
	found, err := s.MGet(ctx, names...).Result()
	if err != nil {
		return nil, nil, err
	}
	for i, v := range found {
		text, ok := v.(string)
		if !ok {
			return nil, nil, fmt.Errorf("redis: the index has a key that is not there: %x", names[i])
		}
		keys, values = append(keys, []byte(names[i])), append(values, []byte(text))
	}
	return keys, values, nil
}

func (s redisStore) swap(ctx context.Context, key, old, value []byte) (bool, error) {
	n, err := swapScript.Run(ctx, s.Client, []string{string(key)}, old, value).Int()
	return n == 1, err
}

// stream sends a pipeline of depth commands, waits for all answers, and sends the next: the client has no way to keep sending.
func (s redisStore) stream(ctx context.Context, depth int, next func(*request) bool, done func(*request, []byte) error) error {
	requests := make([]request, depth)
	for {
		p, n := s.Pipeline(), 0
		for n < depth && next(&requests[n]) {
			if r := &requests[n]; r.value != nil {
				p.Set(ctx, string(r.key), r.value, 0)
			} else {
				p.Get(ctx, string(r.key))
			}
			n++
		}
		if n == 0 {
			return nil
		}
		answers, err := p.Exec(ctx)
		if err != nil {
			return err
		}
		for i, answer := range answers {
			var value []byte
			if got, ok := answer.(*redis.StringCmd); ok {
				value, _ = got.Bytes() // its error would have been that of Exec
			}
			if err := done(&requests[i], value); err != nil {
				return err
			}
		}
	}
}

func (s redisStore) close() error { return s.Close() }

// redisSyncsAs checks that the server keeps its append-only file as the arm's name says. It counts no syncs.
func redisSyncsAs(policy string) func(context.Context, *server) error {
	return func(ctx context.Context, s *server) error {
		c := s.stores[0].(redisStore)
		for name, want := range map[string]string{"appendonly": "yes", "appendfsync": policy} {
			all, err := c.ConfigGet(ctx, name).Result()
			if err != nil {
				return err
			}
			if all[name] != want {
				return fmt.Errorf("redis: %s is %q, want %q", name, all[name], want)
			}
		}
		return nil
	}
}
