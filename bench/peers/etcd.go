package peers

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// etcd speaks to an etcd of one member.
type etcd struct{ *clientv3.Client }

func dialEtcd(address string) (store, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, DialTimeout: readyTimeout, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	return etcd{c}, nil
}

func (e etcd) get(ctx context.Context, key []byte) ([]byte, error) {
	r, err := e.Get(ctx, string(key))
	if err != nil || len(r.Kvs) == 0 {
		return nil, err
	}
	return r.Kvs[0].Value, nil
}

func (e etcd) put(ctx context.Context, key, value []byte) error {
	_, err := e.Put(ctx, string(key), string(value))
	return err
}

func (e etcd) insert(ctx context.Context, key, value []byte) error { return e.put(ctx, key, value) }

func (e etcd) putAll(ctx context.Context, keys, values [][]byte) error {
	ops := make([]clientv3.Op, len(keys))
	for i := range ops {
		ops[i] = clientv3.OpPut(string(keys[i]), string(values[i]))
	}
	_, err := e.Txn(ctx).Then(ops...).Commit()
	return err
}

// scan reads a range. etcd counts what the whole range has, whatever the limit: one without an end costs as much as all that follows.
func (e etcd) scan(ctx context.Context, from, to []byte, limit int) (keys, values [][]byte, err error) {
	end := clientv3.WithFromKey()
	if to != nil {
		end = clientv3.WithRange(string(to))
	}
	r, err := e.Get(ctx, string(from), end, clientv3.WithLimit(int64(limit)))
	if err != nil {
		return nil, nil, err
	}
	for _, kv := range r.Kvs {
		keys, values = append(keys, kv.Key), append(values, kv.Value)
	}
	return keys, values, nil
}

func (e etcd) swap(ctx context.Context, key, old, value []byte) (bool, error) {
	k := string(key)
	r, err := e.Txn(ctx).If(clientv3.Compare(clientv3.Value(k), "=", string(old))).Then(clientv3.OpPut(k, string(value))).Commit()
	if err != nil {
		return false, err
	}
	return r.Succeeded, nil
}

func (e etcd) stream(ctx context.Context, depth int, next func(*request) bool, done func(*request, []byte) error) error {
	return concurrently(ctx, e, depth, next, done)
}

func (e etcd) close() error { return e.Close() }
