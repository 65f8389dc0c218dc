terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.60" # 6 renames some arguments
    }
  }
}

provider "aws" {
  region = var.region
}
