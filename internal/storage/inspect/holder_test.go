package inspect

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestLostHolderIsNotDamage: a verification for which the log is not kept any more ends with the reason, and reports nothing
// that it misses as damage.
func TestLostHolderIsNotDamage(t *testing.T) {
	s := newStore(t)
	s.close()
	state, err := storage.Files{FS: s.fs, Dir: "db"}.OpenState()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = state.Close() }()
	v := newVerifier(context.Background(), VerifyOptions{})
	gone := &wal.HolderEndedError{Name: "verify", Owner: "test", Reason: "the disk is full"}
	var got *wal.HolderEndedError
	if err := v.checkLog(state, wal.Proof{Segment: 99}, keys.MaxEpoch, func() error { return gone }); !errors.As(err, &got) || v.report.DamageTotal != 0 {
		t.Fatalf("%v, %d damages", err, v.report.DamageTotal)
	}
}
