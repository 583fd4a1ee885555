package inspect

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Damage is one damaged place.
type Damage struct {
	Kind     DamageKind
	File     string
	Offset   int64
	Page     page.ID // zero if it is not a page of the data file
	KeyLower []byte  // the client keys [KeyLower, KeyUpper) that it may hide; nil is no bound
	KeyUpper []byte
	Reason   string
	// OnlySpace means that no data is damaged, and space is taken that nothing uses.
	OnlySpace bool
}

// DamageKind says what is damaged.
type DamageKind string

// What can be damaged.
const (
	DamageSuperblock    DamageKind = "superblock"     // a superblock or its copy; one alone costs nothing, and the next start repairs it
	DamagePage          DamageKind = "page"           // a page of the tree
	DamageValue         DamageKind = "value"          // a blob; the range is its key
	DamageBlobs         DamageKind = "blobs"          // the indirection table of the blobs
	DamageAllocationMap DamageKind = "allocation_map" // the allocation map
	DamageAccounts      DamageKind = "accounts"       // pages, blobs, keys or bytes do not add up
	DamageLog           DamageKind = "log"
	DamageQuarantine    DamageKind = "quarantine" // the quarantine file, or one of the two copies in it; one copy alone costs nothing
)

// damagesMax bounds the list of damages; the rest is counted.
const damagesMax = 1000

func damageOf(state *storage.DurableState, err error, kind DamageKind) Damage {
	d := Damage{Kind: kind, File: state.Pages.Name(), Reason: err.Error()}
	if found, ok := errors.AsType[*pager.CorruptError](err); ok {
		d.Page, d.Offset, d.Reason = found.Page, found.Offset, found.Reason
	}
	return d
}

// damageOfPage describes the page at which a walk has failed. The page may have keys from lo up to
// hi.
func damageOfPage(state *storage.DurableState, id page.ID, lo, hi *page.Separator, err error) Damage {
	d := damageOf(state, err, DamagePage)
	if d.Page == 0 {
		d.Page, d.Offset = id, int64(id)*int64(state.Pages.PageSize())
	}
	d.KeyLower, d.KeyUpper = storage.ClientKeys(lo, hi)
	return d
}

// unlessDamage returns the error that ends a walk over damaged files. It is nil if err is damage:
// the walk then continues without the damaged page.
func unlessDamage(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if storage.IsDamage(err) {
		return nil
	}
	return err
}
