package storage_test

import (
	"context"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

func init() {
	storage.Inspect.Engine = func(ctx context.Context, e *storage.Engine) (storage.Inspection, error) {
		return verified(inspect.Verify(ctx, e, inspect.VerifyOptions{}))
	}
	storage.Inspect.Files = func(ctx context.Context, fs vfs.FS, dir string) (storage.Inspection, error) {
		return verified(inspect.VerifyDir(ctx, fs, dir, inspect.VerifyOptions{}))
	}
	storage.Inspect.Repair = inspect.RepairLog
	storage.Inspect.Salvage = func(
		ctx context.Context, fs vfs.FS, dir string, write func(key, value []byte, epoch keys.Epoch) error,
	) (storage.Inspection, error) {
		r, err := inspect.Salvage(ctx, fs, dir, func(e *inspect.Salvaged) error { return write(e.Key, e.Value, e.Epoch) })
		if r == nil {
			return storage.Inspection{}, err
		}
		return inspection(r.Epoch, r.Lost, r.Notes), err
	}
}

func verified(r *inspect.VerifyReport, err error) (storage.Inspection, error) {
	if r == nil {
		return storage.Inspection{}, err
	}
	return inspection(r.Epoch, r.Damages, r.Notes), err
}

func inspection(epoch keys.Epoch, damages []inspect.Damage, notes []string) storage.Inspection {
	out := storage.Inspection{Epoch: epoch, Notes: notes}
	for i := range damages {
		out.Kinds = append(out.Kinds, string(damages[i].Kind))
		out.Damages = append(out.Damages, fmt.Sprintf("%+v", damages[i]))
	}
	return out
}
