package backup

import (
	"context"
	"encoding/json"
	"path"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
)

// ManifestError is a manifest that cannot be read: it is damaged, or has a newer format. What else tells how new its backup is says
// whether another one may be taken in its place.
type ManifestError struct {
	ID    string     // from the name of the object
	Epoch keys.Epoch // of the state, if that is known
	Known bool       // the superblock in the manifest is whole
	cause error
}

func (e *ManifestError) Error() string { return e.cause.Error() }

// Unwrap returns why it cannot be read.
func (e *ManifestError) Unwrap() error { return e.cause }

// NewerThan reports whether the backup has a later epoch than another one, or was begun after it by the clock of the server.
func (e *ManifestError) NewerThan(id string, epoch keys.Epoch) bool {
	return e.Known && e.Epoch > epoch || e.ID > id
}

// Begun is the second in which a backup was begun, from its id: no commit of its state is later. It is not ok if the id says nothing.
func Begun(id string) (_ time.Time, ok bool) {
	at, _, _ := strings.Cut(id, "-")
	t, err := time.Parse(idTime, at)
	return t, err == nil
}

// manifestError describes the object of a manifest that cannot be read. Its superblock has a checksum of its own.
func manifestError(ctx context.Context, store objectstore.Store, dir, name string, cause error) *ManifestError {
	e := &ManifestError{cause: cause}
	e.ID, _, _ = strings.Cut(path.Base(name), ".")
	var manifest struct {
		State struct {
			Superblock []byte `json:"superblock"`
		} `json:"state"`
	}
	p, err := readObject(ctx, store, name)
	if err != nil || json.Unmarshal(p, &manifest) != nil {
		return e
	}
	if info, err := storage.DescribeCopy(manifest.State.Superblock); err == nil && Dir(info.History.Lineage, info.StoreID) == dir {
		e.Epoch, e.Known = info.Epoch, true
	}
	return e
}
