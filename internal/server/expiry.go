package server

import (
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Bounds of the time after which a key expires.
const (
	ttlMin = time.Second
	ttlMax = 100 * 365 * 24 * time.Hour
)

// expiryLagMax is the lag of expiry that is reported as a condition. The promise is a second.
const expiryLagMax = 10 * time.Second

// lifetime is when a key is to expire, as a request says it: at most one of the two.
type lifetime interface {
	GetTtlMs() uint64
	GetExpiresAtMs() uint64
}

// toDeadline turns what a request says into a deadline by the store's clock, in milliseconds since 1970; zero is none.
func toDeadline(l lifetime, now uint64, prefix string) (uint64, error) {
	ttl, at := l.GetTtlMs(), l.GetExpiresAtMs()
	const least, most = uint64(ttlMin / time.Millisecond), uint64(ttlMax / time.Millisecond)
	switch {
	case ttl == 0 && at == 0:
		return 0, nil
	case ttl != 0 && at != 0:
		return 0, invalidTTL(prefix+"ttl_ms", "is given together with expires_at_ms; give one of them")
	case ttl != 0 && (ttl < least || ttl > most):
		return 0, invalidTTL(prefix+"ttl_ms", "must be from 1,000 ms to 100 years")
	case ttl != 0:
		return now + ttl, nil
	case at > now+most:
		return 0, invalidTTL(prefix+"expires_at_ms", "is more than 100 years ahead")
	}
	return at, nil
}

func invalidTTL(field, text string) error {
	return &argumentError{reason: pb.ErrorReason_ERROR_REASON_INVALID_TTL, field: field, text: text}
}

// nowMillis is the store's clock in milliseconds since 1970.
func nowMillis(s *mvcc.Store) uint64 { return s.Clock().Now() / 1000 }

// attributes are what a put says of the key beside its value.
type attributes interface {
	lifetime
	GetLeaseId() uint64
}

func toMetadata(a attributes, now uint64, prefix string) (f mvcc.Metadata, err error) {
	f.Lease = a.GetLeaseId()
	f.ExpiresAt, err = toDeadline(a, now, prefix)
	return f, err
}

// set adds a put with attributes to the write.
func (c *executor) set(key, value []byte, a attributes, prefix string) error {
	f, err := toMetadata(a, nowMillis(c.session.Store()), prefix)
	if err == nil {
		c.write.SetWithMetadata(key, value, &f)
	}
	return err
}

// noLifetime refuses the lifetime of an operation that leaves no value.
func noLifetime(l lifetime, prefix string) error {
	if l.GetTtlMs()|l.GetExpiresAtMs() != 0 {
		return invalidTTL(prefix+"ttl_ms", "is given for an operation that takes none")
	}
	return nil
}

func featureLevelFault(e *mvcc.FeatureLevelError) fault {
	return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_FEATURE_LEVEL, metadata: map[string]string{
		"needs": strconv.Itoa(int(e.Needs)), "level": strconv.Itoa(int(e.Level)),
	}}
}
