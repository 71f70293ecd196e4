package slotmgr

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// DropPublication drops a publication and reports whether there was one.
func DropPublication(ctx context.Context, conn *pgx.Conn, name string) (bool, error) {
	var exists bool
	doing := fmt.Sprintf("drop publication %q", name)
	if err := conn.QueryRow(ctx, "select exists (select from pg_publication where pubname = $1)", name).Scan(&exists); err != nil {
		return false, sqlFailure(conn, err, doing)
	}
	if !exists {
		return false, nil
	}
	if _, err := conn.Exec(ctx, "drop publication if exists "+quote(name)); err != nil {
		if sqlstate(err) == codeInsufficientPrivilege {
			return false, fmt.Errorf("%s, which its owner may: %w", doing, err)
		}
		return false, sqlFailure(conn, err, doing)
	}
	return true, nil
}
