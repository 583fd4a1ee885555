package main

import (
	"context"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func (a *app) resizeCacheCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "resize-cache SIZE",
		Short: "Change the size of the server's page cache",
		Long: `Change the size of the server's page cache while the server runs. The size lasts until the server restarts; its option --cache-size sets the
size permanently. The cache cannot use the memory that --memory reserves for memtables and log buffers.`,
		Example: "  kvctl resize-cache 256MiB",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			size, err := parseBytes(args[0])
			if err != nil {
				return usageError{err}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				before, err := c.ResizeCache(ctx, size)
				if err != nil {
					return err
				}
				if a.formatOr(formatTable) == formatTable {
					return a.print("page cache: %d bytes, before %d\n", size, before)
				}
				return a.print("{\"cache_bytes\":%d,\"previous_bytes\":%d}\n", size, before)
			})
		},
	}
}

// parseBytes reads a size as the server's flags take it: a whole number of bytes, KiB, MiB or GiB.
func parseBytes(text string) (uint64, error) {
	number, factor := text, uint64(1)
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		if n, ok := strings.CutSuffix(text, unit); ok {
			number, factor = n, 1<<(10*(i+1))
		}
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if high, _ := bits.Mul64(n, factor); err != nil || high != 0 {
		return 0, fmt.Errorf("%q is not a size; write a whole number of bytes, or with KiB, MiB or GiB, such as 256MiB", text)
	}
	return n * factor, nil
}
