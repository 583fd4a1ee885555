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
	return untilResult(stream, (*kvpb.CreateBackupResponse).GetBackup, (*kvpb.CreateBackupResponse).GetProgress, progress)
}

// BackupStatus returns the backup that the server makes, and the last one that ended.
func (c *Client) BackupStatus(ctx context.Context) (*kvpb.GetBackupStatusResponse, error) {
	return call(ctx, c, safe, c.backups.GetBackupStatus, &kvpb.GetBackupStatusRequest{})
}

// ListBackups returns the backups of one history in a target, which the server reads.
func (c *Client) ListBackups(ctx context.Context, r *kvpb.ListBackupsRequest) (*kvpb.ListBackupsResponse, error) {
	return call(ctx, c, safe, c.backups.ListBackups, r)
}

// VerifyBackup makes the server read a backup and check every byte. Progress, if not nil, is called several times a second. Only ctx
// bounds the call. Damage is an error.
func (c *Client) VerifyBackup(ctx context.Context, r *kvpb.VerifyBackupRequest, progress func(*kvpb.BackupVerification)) (*kvpb.BackupVerification, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.backups.VerifyBackup(ctx, r)
	if err != nil {
		return nil, newError(err)
	}
	return untilResult(stream, (*kvpb.VerifyBackupResponse).GetReport, (*kvpb.VerifyBackupResponse).GetProgress, progress)
}

// PruneBackups makes the server remove old backups of one history from a target. Only ctx bounds the call; when it ends early, the next
// one goes on.
func (c *Client) PruneBackups(ctx context.Context, r *kvpb.PruneBackupsRequest) (*kvpb.PruneBackupsResponse, error) {
	response, err := c.backups.PruneBackups(ctx, r)
	if err != nil {
		return nil, newError(err)
	}
	return response, nil
}
