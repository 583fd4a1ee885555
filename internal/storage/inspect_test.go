package storage

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Inspect is package inspect for the tests of this package. That package imports this one, so inspectsetup_test.go, which is outside, sets it.
var Inspect struct {
	Engine  func(ctx context.Context, e *Engine) (Inspection, error)
	Files   func(ctx context.Context, fs vfs.FS, dir string) (Inspection, error)
	Salvage func(ctx context.Context, fs vfs.FS, dir string, write func(key, value []byte, epoch keys.Epoch) error) (Inspection, error)
	Repair  func(fs vfs.FS, dir string) (wal.Dropped, error)
}

// Inspection is what a verification or a salvage reports.
type Inspection struct {
	Epoch   keys.Epoch
	Kinds   []string // of damage
	Damages []string // in words
	Notes   []string
}
