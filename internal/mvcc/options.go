package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
)

// Defaults, as documented at Options and Limits.
const (
	defaultSyncInterval   = 50 * time.Millisecond
	defaultGCInterval     = 100 * time.Millisecond
	defaultCheckpoint     = 5 * time.Minute
	defaultValueBytes     = 16 << 20
	defaultBatchBytes     = 64 << 20
	defaultBatchOps       = 1_000_000
	defaultSessions       = 8192
	defaultSnapshotLeases = 4096
	defaultPageSize       = 8192
	defaultRequestWindow  = 15 * time.Minute
	defaultRequestBytes   = 1 << 30
)

func (o *Options) setDefaults() {
	if o.Durability == DurabilityDefault {
		o.Durability = DurabilitySync
	}
	orDefault(&o.SyncInterval, defaultSyncInterval)
	orDefault(&o.GCInterval, defaultGCInterval)
	orDefault(&o.CheckpointInterval, defaultCheckpoint)
	orDefault(&o.RequestWindow, defaultRequestWindow)
	orDefault(&o.RequestBytes, defaultRequestBytes)
	orDefault(&o.Storage.PageSize, defaultPageSize)
	if o.Owner == nil {
		o.Owner = func(context.Context) Owner { return Owner{} }
	}
	l := &o.Limits
	orDefault(&l.KeyBytes, storage.KeyBytesMax(o.Storage.PageSize))
	orDefault(&l.BatchBytes, defaultBatchBytes)
	orDefault(&l.ValueBytes, min(defaultValueBytes, l.BatchBytes))
	orDefault(&l.BatchOps, defaultBatchOps)
	orDefault(&l.InvokeBytes, l.BatchBytes)
	orDefault(&l.Sessions, defaultSessions)
	orDefault(&l.SessionsBeside, l.Sessions)
	orDefault(&l.SnapshotLeases, defaultSnapshotLeases)
}

// check refuses limits that the layers below cannot keep: what is acknowledged must fit into the tree.
func (l *Limits) check(pageSize int) error {
	if limit := storage.KeyBytesMax(pageSize); l.KeyBytes > limit {
		return &LimitError{What: "key bytes", Limit: limit, Got: l.KeyBytes}
	}
	if limit := storage.BatchBytesMax(l.BatchOps); l.BatchBytes > limit {
		return &LimitError{What: "batch bytes", Limit: limit, Got: l.BatchBytes}
	}
	if l.ValueBytes > l.BatchBytes {
		return &LimitError{What: "value bytes", Limit: l.BatchBytes, Got: l.ValueBytes}
	}
	return nil
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
