package client

import (
	"context"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// CreateBackup makes the server copy its store to a directory or a bucket. Progress, if not nil, is called several times a second.
// Only ctx bounds the call; when it ends, so does the backup.
func (c *Client) CreateBackup(ctx context.Context, r *kvpb.CreateBackupRequest, progress func(*kvpb.BackupProgress)) (*kvpb.BackupInfo, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.backups.CreateBackup(ctx, r)
	if err != nil {
		return nil, newError(err)
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return nil, newError(err)
		}
		if made := response.GetBackup(); made != nil {
			return made, nil
		}
		if progress != nil {
			progress(response.GetProgress())
		}
	}
}

// BackupStatus returns the backup that the server makes, and the last one that ended.
func (c *Client) BackupStatus(ctx context.Context) (*kvpb.GetBackupStatusResponse, error) {
	return call(ctx, c, safe, c.backups.GetBackupStatus, &kvpb.GetBackupStatusRequest{})
}
