package client

import (
	"context"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// ArchiveStatus tells how far the log archive of the server is, and which states can be restored from it.
func (c *Client) ArchiveStatus(ctx context.Context) (*kvpb.ArchiveStatusResponse, error) {
	return call(ctx, c, safe, c.admin.ArchiveStatus, &kvpb.ArchiveStatusRequest{})
}
