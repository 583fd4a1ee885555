package client

import (
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Lifetime says when a key expires. The zero Lifetime is never.
type Lifetime struct {
	ttl time.Duration
	at  time.Time
}

// For is a lifetime of d from when the server executes the request: 1 second to 100 years, in milliseconds.
func For(d time.Duration) Lifetime {
	if d == 0 {
		d = -1 // zero would be never
	}
	return Lifetime{ttl: d}
}

// Until is a lifetime that ends at a time, by the server's clock.
func Until(at time.Time) Lifetime {
	if at.IsZero() {
		at = time.UnixMilli(0) // long ago, and not never
	}
	return Lifetime{at: at}
}

// wire is what a request says: at most one of the two is not zero. A lifetime that is not positive becomes one that the server
// refuses, or one that has ended.
func (l Lifetime) wire() (ttl, at uint64) {
	switch {
	case !l.at.IsZero():
		return 0, uint64(max(l.at.UnixMilli(), 1))
	case l.ttl != 0:
		return uint64(max(l.ttl.Milliseconds(), 1)), 0
	}
	return 0, 0
}

// Expires makes the key of a Put expire. Other writes ignore it: a Batch has PutExpiring, an Invocation Expiring.
func Expires(l Lifetime) WriteOption { return func(o *writeOptions) { o.lifetime = l } }

// PutExpiring adds "key becomes value, for a lifetime".
func (b *Batch) PutExpiring(key, value []byte, l Lifetime) { b.add(putMutation(key, value, l)) }

// PutExpiring is Put of a value that expires.
func (t *Txn) PutExpiring(key, value []byte, l Lifetime) error {
	return t.write(putMutation(key, value, l))
}

// OpPutExpiring is OpPut of a value that expires.
func OpPutExpiring(key, value []byte, l Lifetime) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Write{Write: putMutation(key, value, l)}}}
}

func putMutation(key, value []byte, l Lifetime) *kvpb.Mutation {
	ttl, at := l.wire()
	return &kvpb.Mutation{Kind: kvpb.Mutation_KIND_PUT, Key: key, Value: value, TtlMs: ttl, ExpiresAtMs: at}
}

// Touch makes key expire at another time, and keeps its value. A missing key stays missing, and the outcome is not applied.
func Touch(key []byte, l Lifetime) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Touch{Touch: true}}}.Expiring(l)
}

// Persist makes key not expire any more, and keeps its value. The outcome is not applied if the key does not expire.
func Persist(key []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Persist{Persist: true}}}
}

// Expiring makes the key expire after the operation.
func (i Invocation) Expiring(l Lifetime) Invocation {
	i.wire.TtlMs, i.wire.ExpiresAtMs = l.wire()
	return i
}

// expiresAt is a time of the wire; zero is never.
func expiresAt(milliseconds uint64) time.Time {
	if milliseconds == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(milliseconds))
}
